"""All that happens to a score between the product and the softmax, and to a probability after it."""
