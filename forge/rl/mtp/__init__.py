"""Multi-token prediction: heads that draft tokens, trained beside the policy and apart from it.

`heads` are the modules, `losses` what a draft is measured by, `training` their own gradient and
optimizer. The policy's trunk, embedding and head are read and never differentiated.
"""

from forge.rl.config import MtpConfig, MtpLoss
from forge.rl.mtp.heads import MtpHeads
from forge.rl.mtp.training import MtpStats, MtpTraining

__all__ = ["MtpConfig", "MtpHeads", "MtpLoss", "MtpStats", "MtpTraining"]
