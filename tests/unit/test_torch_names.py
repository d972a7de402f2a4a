"""Names of unnamed operations."""

from phub_collective.torch.names import OperationNames


def test_a_loop_uses_the_same_name_again() -> None:
    names = OperationNames()
    for _ in range(3):
        name = names.take("allreduce.float32.100")
        assert name == "allreduce.float32.100.0"
        names.release(name)


def test_those_in_flight_are_numbered_by_signature() -> None:
    names = OperationNames()
    assert [names.take("a") for _ in range(3)] == ["a.0", "a.1", "a.2"]
    assert names.take("b") == "b.0"
    names.release("a.1")
    assert names.take("a") == "a.1"
    assert names.take("a") == "a.3"
