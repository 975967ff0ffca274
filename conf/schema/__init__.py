"""The configuration's types: strict, immutable, without unknown keys. Values live in the YAML groups."""

from conf.schema.algorithm import Algorithm, DynamicSampling, Overlong
from conf.schema.base import Problem, Refusal, Section
from conf.schema.benchmark import Benchmark
from conf.schema.correction import Correction, RejectionRule
from conf.schema.data import Data, JsonlData, ReasoningGymData
from conf.schema.engines import KvPreflight, Optimizer, Rollout, TorchRollout, Trainer, VllmRollout
from conf.schema.environment import Cluster, Storage, Tracking
from conf.schema.model import Model, TinyArchitecture, WarmStart
from conf.schema.recipe import Calibration, KvPrecision, LinearPrecision, Recipe
from conf.schema.run import RunConfig

__all__ = [
    "Algorithm",
    "Benchmark",
    "Calibration",
    "Cluster",
    "Correction",
    "Data",
    "DynamicSampling",
    "JsonlData",
    "KvPrecision",
    "KvPreflight",
    "LinearPrecision",
    "Model",
    "Optimizer",
    "Overlong",
    "Problem",
    "ReasoningGymData",
    "Recipe",
    "Refusal",
    "RejectionRule",
    "Rollout",
    "RunConfig",
    "Section",
    "Storage",
    "TinyArchitecture",
    "TorchRollout",
    "Tracking",
    "Trainer",
    "VllmRollout",
    "WarmStart",
]
