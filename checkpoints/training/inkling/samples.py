"""Writes the files to try the tiny Inkling with: held-out pictures and a tone, named after what they hold.

python -m checkpoints.training.inkling.samples
"""

from random import Random

from checkpoints.training.inkling.pictures import png
from checkpoints.training.inkling.sights import a_picture, a_tone
from checkpoints.training.inkling.tokenizer import CHECKPOINT
from checkpoints.training.inkling.tones import wav

FOLDER = CHECKPOINT / "samples"


def samples() -> dict[str, bytes]:
    """The files by name."""
    rng = Random("samples")
    pictures, tone = [a_picture(rng, held=True) for _ in range(2)], a_tone(rng, held=True)
    files = {f"{p.colour}-{p.shape}-on-{p.background}.png": png(p.pixels) for p in pictures}
    return files | {f"{tone.note.lower().replace(' ', '-')}.wav": wav(tone.samples)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in samples().items():
        (FOLDER / name).write_bytes(content)
        print(f"{FOLDER.name}/{name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
