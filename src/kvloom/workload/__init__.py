"""The inputs of commands: models, texts, one timed forward pass, and what layers attend with."""
