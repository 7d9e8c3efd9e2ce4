import sys
from pathlib import Path

import pytest
from grpc_harness import Harness, running_loop, write_tokenizer
from inkling_folder import write_inkling

# Pictures and sounds shared with the tests of media.
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))


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


@pytest.fixture(scope="session")
def inkling_model(tmp_path_factory):
    """A folder, and settings of a harness that serves it."""
    folder = tmp_path_factory.mktemp("inkling")
    media_format, end = write_inkling(folder)
    return folder, {"media_format": media_format, "eos_token_ids": (end,)}


@pytest.fixture(scope="module")
def inkling(loop, inkling_model):
    """One server of a model that reads pictures and sound, over both protocols; its engine needs no time."""
    folder, settings = inkling_model
    with Harness(loop, folder, services=("vllm", "tokenspeed"), **settings) as harness:
        yield harness
