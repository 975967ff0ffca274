"""The configuration's types: strict, immutable, without unknown keys. Values live in the YAML groups."""

from conf.schema.algorithm import Algorithm, Correction
from conf.schema.base import Problem, Refusal, Section
from conf.schema.data import Data, JsonlData, ReasoningGymData
from conf.schema.engines import Optimizer, Rollout, Trainer
from conf.schema.environment import Cluster, Storage, Tracking
from conf.schema.model import Model, TinyArchitecture, WarmStart
from conf.schema.recipe import Calibration, KvPrecision, LinearPrecision, Recipe
from conf.schema.run import RunConfig

__all__ = [
    "Algorithm",
    "Calibration",
    "Cluster",
    "Correction",
    "Data",
    "JsonlData",
    "KvPrecision",
    "LinearPrecision",
    "Model",
    "Optimizer",
    "Problem",
    "ReasoningGymData",
    "Recipe",
    "Refusal",
    "Rollout",
    "RunConfig",
    "Section",
    "Storage",
    "TinyArchitecture",
    "Tracking",
    "Trainer",
    "WarmStart",
]
