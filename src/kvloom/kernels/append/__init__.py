"""A step's own keys and values, written behind those held if they are what they should be."""
