"""The configuration's types: strict, immutable, without unknown keys. Values live in the YAML groups."""

from conf.schema.algorithm import Algorithm, DynamicSampling, Overlong
from conf.schema.base import Problem, Refusal, Section
from conf.schema.benchmark import Benchmark
from conf.schema.breakers import BreakerRule, Breakers
from conf.schema.correction import Correction, RejectionRule
from conf.schema.data import Data, JsonlData, ReasoningGymData, SyntheticData
from conf.schema.deadlines import Deadlines
from conf.schema.engines import KvPreflight, Rollout, TorchRollout, VllmRollout
from conf.schema.environment import Cluster, Storage, Tracking
from conf.schema.model import Experts, LatentAttention, Model, RopeScaling, TinyArchitecture, WarmStart
from conf.schema.recipe import Calibration, KvPrecision, LinearPrecision, Recipe
from conf.schema.run import RunConfig
from conf.schema.sweep import Bootstrap, Corridor, Gates, Prices, Sweep, Tolerance
from conf.schema.trainers import LrSchedule, MegatronTrainer, Optimizer, TorchTrainer, Trainer

__all__ = [
    "Algorithm",
    "Benchmark",
    "Bootstrap",
    "BreakerRule",
    "Breakers",
    "Calibration",
    "Cluster",
    "Correction",
    "Corridor",
    "Data",
    "Deadlines",
    "DynamicSampling",
    "Experts",
    "Gates",
    "JsonlData",
    "KvPrecision",
    "KvPreflight",
    "LatentAttention",
    "LinearPrecision",
    "LrSchedule",
    "MegatronTrainer",
    "Model",
    "Optimizer",
    "Overlong",
    "Prices",
    "Problem",
    "ReasoningGymData",
    "Recipe",
    "Refusal",
    "RejectionRule",
    "Rollout",
    "RopeScaling",
    "RunConfig",
    "Section",
    "Storage",
    "Sweep",
    "SyntheticData",
    "TinyArchitecture",
    "Tolerance",
    "TorchRollout",
    "TorchTrainer",
    "Tracking",
    "Trainer",
    "VllmRollout",
    "WarmStart",
]
