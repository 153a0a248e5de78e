"""Framework-neutral core of e²IP: equivariant evidential uncertainty for atomic forces.

Nothing is imported here: the model-side modules need only torch, the evaluation side
(``metrics``, ``compare``, ``cli``) also NumPy, SciPy and ASE, and neither may drag the other in.
"""

__version__ = "0.1.0"
