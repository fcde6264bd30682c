"""The two questions that a candidate must answer, whatever its direction and its features."""

from blocktune.kernels.features import NO_FEATURES
from blocktune.kernels.shape import AttentionShape, Direction
from blocktune.tuner.check import Question, make_questions
from blocktune.tuner.feature_questions import FeatureQuestion, make_feature_questions
from blocktune.tuner.gradients import GradientQuestion, make_gradient_questions

AnyQuestion = Question | FeatureQuestion | GradientQuestion


def questions_of(shape: AttentionShape, *, device: str, seed: int) -> tuple[AnyQuestion, AnyQuestion]:
    """The plain and the hard question of a shape."""
    if shape.direction is Direction.BACKWARD:
        return make_gradient_questions(shape, device=device, seed=seed)
    if shape.features != NO_FEATURES:
        return make_feature_questions(shape, device=device, seed=seed)
    return make_questions(shape, device=device, seed=seed)
