"""An exported model in MLflow's registry, by reference: its weights stay where the run wrote them.

A version is a small MLflow model (MLmodel, signature, requirements and exported_model.py) among the run's artifacts.
MLflow's servers refuse sources outside of artifacts, and copying weights to them would take as long as the run's own
export. Loading the version reads the export's directory, and fails where that has another
step's model by then.
"""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FOLDER = "model"
LIBRARIES = ("mlflow", "torch", "transformers", "safetensors")


def log_model(client: MlflowClient, run_id: str, export: Path, name: str, run: str) -> str:
    """Returns the version of model `name` for the model in `export`; registers it if there is none yet. run: this run's
    name. Raises the errors of mlflow and its store, and OSError."""
    from mlflow.exceptions import MlflowException

    try:
        step = str(json.loads((export / "megagrpo.json").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        step = ""
    tags = {"megagrpo.run": run, "megagrpo.step": step}
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.run_id == run_id and tags.items() <= dict(version.tags).items():
            return str(version.version)
    folder = f"{FOLDER}_step_{step}" if step else FOLDER
    _log_reference(client, run_id, export.absolute(), folder, step)
    source = f"{client.get_run(run_id).info.artifact_uri}/{folder}"
    return str(client.create_model_version(name, source, run_id=run_id, tags=tags).version)


def _log_reference(client: MlflowClient, run_id: str, export: Path, folder: str, step: str) -> None:
    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        Schema([ColSpec("string", "prompt")]),
        Schema([ColSpec("string", "response")]),
        ParamSchema([ParamSpec("max_new_tokens", "integer", 256), ParamSpec("temperature", "float", 0.0)]),
    )
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / FOLDER
        pyfunc.save_model(
            made,
            python_model=str(Path(__file__).with_name("exported_model.py")),
            model_config={"directory": str(export), "step": step},
            signature=signature,
            pip_requirements=[f"{library}=={metadata.version(library)}" for library in LIBRARIES],
        )
        client.log_artifacts(run_id, str(made), folder)
