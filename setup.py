"""The package definition. Ranges here; the exact versions that CI runs are in requirements/cpu.txt.

megatron-core and emerging_optimizers declare Python 3.12. On 3.11 they are installed apart, as `make` does: pip install
--no-deps --ignore-requires-python -r requirements/megatron_core.txt.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megagrpo",
    version="0.1.0",
    description="GRPO for large language models on Megatron-Core, SGLang and Ray",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megagrpo", "megagrpo.*"]),
    package_data={
        "megagrpo.importing": ["*.yaml"],
        "megagrpo.plan": ["configs/*/*/config.json"],
        "megagrpo.plan.show": ["page.css"],
        "megagrpo.report": ["*.css", "*.js", "vendor/*"],
        "megagrpo.track": ["metrics.yaml"],
    },
    install_requires=[
        "torch>=2.9",
        "megatron-core>=0.19.2,<0.20; python_version >= '3.12'",
        "ray>=2.50",
        "transformers>=5.0",
        "safetensors>=0.5",
        "pydantic>=2.11",
        "pyyaml>=6.0",
        "pyarrow>=18",
        "mlflow>=3.4",
        "rich>=13",
        "math-verify>=0.8",
        "numpy>=1.26",
        "fsspec>=2024.6",
        "aiohttp>=3.10",
        "regex>=2024.4",
        "psutil>=6",
        "einops>=0.8",
        "packaging>=24.2",
        "jsonschema>=4.20",
        "referencing>=0.30",
    ],
    extras_require={
        "sglang": ["sglang>=0.5.23,<0.6"],
        "te": ["transformer-engine[pytorch]>=2.17.1,<2.18"],
        "muon": ["emerging_optimizers>=0.3,<0.4; python_version >= '3.12'"],
        "reasoning-gym": ["reasoning-gym>=0.1.25,<0.2"],
        "wandb": ["wandb>=0.18"],
        "tensorboard": ["tensorboard>=2.18"],
        "prometheus": ["prometheus-client>=0.20"],
        "ifeval": ["nltk>=3.9.1", "langdetect>=1.0.9"],
        "language": ["py3langid>=0.4"],
        "search": ["bm25s>=0.3,<0.4"],
        "mcp": ["mcp>=2.3,<3"],
        "docs": ["mkdocs>=1.6.1,<2", "mkdocs-material>=9.8,<10"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            "matplotlib>=3.9",
            "networkx>=3.0",
            "playwright>=1.60",
            "ruff>=0.9",
            "mypy>=1.13",
            "import-linter>=2.1",
            "types-PyYAML",
            "py3langid>=0.4",
            "bm25s>=0.3,<0.4",
            "mcp>=2.3,<3",
            "prometheus-client>=0.20",
            "tensorboard>=2.18",
            "wandb>=0.18",
        ],
    },
    entry_points={"console_scripts": ["megagrpo=megagrpo.cli:main"]},
)
