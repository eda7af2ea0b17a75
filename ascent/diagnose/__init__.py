"""Looking closely: the exact gradient, and what an estimator of it is worth."""
