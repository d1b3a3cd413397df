"""What a schedule costs: bytes, memory, and time on a machine. Nothing here changes a schedule."""
