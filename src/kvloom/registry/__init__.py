"""What plugins register, and how the fields of a recipe are checked."""
