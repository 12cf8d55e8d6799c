"""The seam to TorchTitan: the only package that imports ``torchtitan``.

TorchTitan's API changes from release to release, so everything that titan_rl uses of it is named in
:mod:`titan_rl.titan.symbols`, checked by a contract test, and imported from here by the other layers.
"""
