"""Run one inference instance: `python -m services.inference --help`."""

from forge.runtime.service import run
from services.inference.app import InferenceApp
from services.inference.config import InferenceConfig

if __name__ == "__main__":
    run("inference", InferenceConfig, InferenceApp)
