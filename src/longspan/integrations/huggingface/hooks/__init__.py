"""What is hooked into a model of transformers, so that it computes on parts of sequences as on whole ones."""
