"""The seam to TorchTitan: the only package that imports ``torchtitan``.

TorchTitan's API changes from release to release, so everything that titan_rl uses of it is named in
:mod:`titan_rl.titan.symbols`, checked by a contract test, and imported from here by the other layers.
"""

import logging

# torchao, which TorchTitan imports, registers two enums as constants. torch 2.14 takes that, and warns in
# every process that a later release will not: whoever reads the log of a run can do nothing about it.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in str(record.msg))
