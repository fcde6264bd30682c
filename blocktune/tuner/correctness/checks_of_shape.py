"""The two questions that a candidate must answer, whatever its direction and its features."""

from blocktune.kernels.values.features import NO_FEATURES
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.correctness.backward import GradientQuestion, make_gradient_questions
from blocktune.tuner.correctness.features import FeatureQuestion, make_feature_questions
from blocktune.tuner.correctness.forward import Question, make_questions

AnyQuestion = Question | FeatureQuestion | GradientQuestion


def questions_of(shape: AttentionShape, *, device: str, seed: int) -> tuple[AnyQuestion, AnyQuestion]:
    """Return the plain and the hard question of a shape."""
    if shape.direction is Direction.BACKWARD:
        return make_gradient_questions(shape, device=device, seed=seed)
    if shape.features != NO_FEATURES:
        return make_feature_questions(shape, device=device, seed=seed)
    return make_questions(shape, device=device, seed=seed)
