"""What all pictures are drawn with: scenes, axes, colours, and pages around them."""
