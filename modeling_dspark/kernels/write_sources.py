"""Write the sources of this folder into `fused_sources.py`, since Transformers copies Python files only.

python modeling_dspark/kernels/write_sources.py
"""

from pathlib import Path


HERE = Path(__file__).parent
FILES = {"HEAD_CPU": "head_cpu.cpp", "HEAD_CUDA": "head_cuda.cu"}
HEADER = (
    '"""C++ and CUDA as text, written by `kernels/write_sources.py`: the files in `kernels/` are the originals."""'
)


def module_text() -> str:
    """The module that holds the sources."""
    parts = [HEADER]
    for name, file in FILES.items():
        source = (HERE / file).read_text()
        if '"""' in source:
            raise ValueError(f"{file} must hold no triple quotes.")
        parts.append(f'{name} = r"""{source}"""')
    names = ", ".join(f'"{name}"' for name in FILES)
    return "\n\n".join([*parts, f"__all__ = [{names}]"]) + "\n"


if __name__ == "__main__":
    (HERE.parent / "fused_sources.py").write_text(module_text())
