"""Longspan in the words of other libraries. Each module here imports the one library it speaks for."""
