"""What is done with a whole answer: whether it has the form that a request asked for."""
