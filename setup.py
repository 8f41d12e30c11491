"""The package definition. Ranges here; the exact versions that CI runs are in requirements/cpu.txt."""

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
    package_data={"megagrpo.plan": ["configs/*/*/config.json"], "megagrpo.plan.show": ["page.css"]},
    install_requires=[
        "torch>=2.9",
        "megatron-core>=0.16.1,<0.17",
        "ray>=2.50",
        "transformers>=5.0",
        "safetensors>=0.5",
        "pydantic>=2.11",
        "pyyaml>=6.0",
        "pyarrow>=18",
        "mlflow>=3.0",
        "rich>=13",
        "math-verify>=0.8",
        "numpy>=1.26",
        "aiohttp>=3.10",
        "psutil>=6",
        "einops>=0.8",
        "packaging>=24.2",
    ],
    extras_require={
        "sglang": ["sglang>=0.5.23,<0.6"],
        "te": ["transformer-engine[pytorch]>=2.9,<2.12"],
        "wandb": ["wandb>=0.18"],
        "tensorboard": ["tensorboard>=2.18"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            "networkx>=3.0",
            "ruff>=0.9",
            "mypy>=1.13",
            "import-linter>=2.1",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["megagrpo=megagrpo.cli:main"]},
)
