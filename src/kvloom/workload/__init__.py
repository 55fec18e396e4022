"""What commands run on: models, texts, and one timed call of a model."""
