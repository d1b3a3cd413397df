"""What `longspan acceptance` looks at: one file per section of its page, every line of the page a value."""
