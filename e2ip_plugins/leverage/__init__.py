"""How well the training set supports an atom: the form of the leverage and the module that models carry."""
