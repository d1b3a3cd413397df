"""Token mixers other than attention: causal convolutions and linear recurrences."""
