import pytest
from grpc_harness import Harness, running_loop, write_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def loop():
    with running_loop() as loop:
        yield loop


@pytest.fixture
def serving(loop, model_folder):
    """Starts servers: `serving(**engine settings)`, stopped after the test."""
    running = []

    def start(**settings) -> Harness:
        running.append(Harness(loop, model_folder, **settings).__enter__())
        return running[-1]

    yield start
    for harness in running:
        harness.__exit__()


@pytest.fixture(scope="module")
def quick(loop, model_folder):
    """One server for tests that only ask it; its engine needs no time."""
    with Harness(loop, model_folder) as harness:
        yield harness
