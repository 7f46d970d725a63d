"""Whether TensorFlow and Keras are there, new enough, and work together; imported before anything of theirs."""

from ...errors import UsageError
from .._packages import check_packages

check_packages("tensorflow", {"tensorflow": (2, 16), "keras": (3, 0)})

import keras  # noqa: E402 - only now is it known to be there

if (backend := keras.backend.backend()) != "tensorflow":
    raise UsageError(
        f"syncline.tensorflow needs Keras to compute by TensorFlow, and here it does by {backend}: set"
        " KERAS_BACKEND=tensorflow before anything imports keras"
    )
