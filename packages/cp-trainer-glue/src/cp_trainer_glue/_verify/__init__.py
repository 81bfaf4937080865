"""The proof: a run as declared beside the same run on one device, every number of it.

Modules, lowest first: `_cause`, `_check`, `_batches`, `_narrow`, `_report`, `_options`, `_capture`, `_declared`,
`_gathered`, `_reference`, `_compare`, `_weighting`, `_case`, `_forward_causes`, `_gradient_causes`, `_number_causes`,
`_causes`, `_verification`.
"""

from ._cause import Cause
from ._check import Check
from ._options import VerifyOptions
from ._report import VerifyReport, largest_error
from ._verification import verify_training

__all__ = ["Cause", "Check", "VerifyOptions", "VerifyReport", "largest_error", "verify_training"]
