"""The scikit-learn face of the method."""

from apfl.methods._estimator.classifier import APFLClassifier
from apfl.methods._estimator.regressor import APFLRegressor

__all__ = ["APFLClassifier", "APFLRegressor"]
