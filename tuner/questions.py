"""The two questions that a candidate of any direction must answer."""

from blocktune.kernels.shape import AttentionShape, Direction
from blocktune.tuner.check import Question, make_questions
from blocktune.tuner.gradients import GradientQuestion, make_gradient_questions

AnyQuestion = Question | GradientQuestion


def questions_of(shape: AttentionShape, *, device: str, seed: int) -> tuple[AnyQuestion, AnyQuestion]:
    """The plain and the hard question of a shape, for its direction."""
    if shape.direction is Direction.BACKWARD:
        return make_gradient_questions(shape, device=device, seed=seed)
    return make_questions(shape, device=device, seed=seed)
