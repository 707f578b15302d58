"""Write the sources of this folder into `fused_sources_dspark.py`, since Transformers copies Python files only.

    python -m modeling_dspark.kernels
"""

from pathlib import Path


HERE = Path(__file__).parent
HEADER = '"""C++ sources as text, written by `python -m modeling_dspark.kernels`: the files in `kernels/` are the originals."""'


def module_text() -> str:
    """The module that holds the sources."""
    source = (HERE / "head_cpu.cpp").read_text()
    if "'''" in source or "\\" in source.replace("\\\n", ""):
        raise ValueError("head_cpu.cpp must hold no triple quotes and no backslashes but at the end of a line.")
    return f"{HEADER}\n\nHEAD_CPU = r'''{source}'''  # noqa: Q001\n\n__all__ = [\"HEAD_CPU\"]\n"


if __name__ == "__main__":
    (HERE.parent / "fused_sources_dspark.py").write_text(module_text())
