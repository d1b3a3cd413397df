"""The solver behind `layouts.balanced`: profiles of work, a pool of document parts, and how they are dealt to ranks."""
