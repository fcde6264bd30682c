"""What every kernel is made of: its interface, its compilation, its launch, and its facts for the models."""
