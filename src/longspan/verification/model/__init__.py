"""A user's whole training step against one device: loss, logits, gradients, and the likely mistake."""
