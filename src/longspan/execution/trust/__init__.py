"""Trust between ranks: what they compare before data moves, and what a message says of itself."""
