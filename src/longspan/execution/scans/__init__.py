"""Linear recurrences over ranks: what a rank computes of them, and what it gets from others."""
