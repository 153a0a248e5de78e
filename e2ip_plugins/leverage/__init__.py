"""How well the training set supports an atom: form of the leverage, module that models carry, errors of energies."""
