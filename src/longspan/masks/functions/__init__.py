"""Functions that users give: called on whole tiles, frozen as they are, and what they read beside their arguments."""
