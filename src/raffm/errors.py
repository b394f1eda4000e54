"""Every error raffm raises on purpose.

RaffmError                     catch this one to catch them all
├── LabelError                 a table, a label or a notation is wrong, or does not fit a tensor
│   └── UnknownFamilyError     there is no table for this kind of model
├── SelectionError             a cut that the layout does not allow
├── SpaceError                 an elastic space or a config of sizes that makes no sense
├── BudgetError                no submodel is small enough
├── DataError                  data that are missing, malformed, or too few for the clients
├── RunError                   a run that makes no sense: an unknown method, fleet or key, or what does not go together
├── UpdateError                a client's update was refused; the server did not change
├── CheckpointError            files that are missing, damaged, foreign or do not fit
└── ExportError                a submodel cannot be written in a format, or its file does not do what the submodel does
"""


class RaffmError(Exception):
    """The base of every error that raffm raises on purpose."""


class LabelError(RaffmError):
    """A table, a label or a notation is wrong, or does not fit a tensor."""


class UnknownFamilyError(LabelError):
    """There is no table for this kind of model."""


class SelectionError(RaffmError):
    """A cut that the layout does not allow."""


class SpaceError(RaffmError):
    """An elastic space or a config of sizes that makes no sense."""


class BudgetError(RaffmError):
    """No submodel is small enough."""


class DataError(RaffmError):
    """Data that are missing, malformed, or too few for the clients."""


class RunError(RaffmError):
    """A run that makes no sense: an unknown method, fleet or key, or what does not go together."""


class UpdateError(RaffmError):
    """A client's update was refused; the server did not change."""


class CheckpointError(RaffmError):
    """Files that are missing, damaged, foreign or do not fit."""


class ExportError(RaffmError):
    """A submodel cannot be written in a format, or its file does not do what the submodel does."""
