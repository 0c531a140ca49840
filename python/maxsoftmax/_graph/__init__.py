"""What runs in MAX graphs: the compiled op, models, and their files."""
