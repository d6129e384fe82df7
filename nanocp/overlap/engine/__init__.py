"""A torch model whose operators run in another order than its program's."""
