"""Framework-neutral core of e²IP: equivariant evidential uncertainty for atomic forces.

Nothing is imported here: the model side (``readout``, ``families``, ``maths``) needs only torch, the evaluation side
(``scores``, ``report``, ``cli``) also SciPy and ASE, and neither may drag the other in.

"The paper" is Wang et al. 2026, https://arxiv.org/abs/2602.10419, in docstrings throughout; equations and
appendices are those of its first version.
"""

__version__ = "0.2.0"
