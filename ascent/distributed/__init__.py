"""Several processes that train one model, started by torchrun: they give the numbers of one process."""
