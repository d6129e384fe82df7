"""Orders of a model's operators, from the systems that introduced them."""
