"""Brings the recorder of `runtime.record` into every rank of a job that another program launches; its script stays unchanged.

The folder to record to and the schedule are in the environment, so that they reach the ranks by whatever launcher. The recorder's
package lies beside this folder, and is loaded under a name of its own. Standard library only; Python 3.8 and later.
"""

import importlib.util
import os
import sys

from dpro_search_process import AfterImport

_PACKAGE = "dpro_search_record"


def install():
    """Arrange for the recorder to count steps as soon as PyTorch's optimizers have been imported."""
    sys.meta_path.insert(0, AfterImport({"torch.optim.optimizer": lambda module: _attach()}))


def _attach():
    """Begin to count steps; whatever fails, the job runs, without a recorder."""
    try:
        record = _loaded()
        schedule = importlib.import_module(_PACKAGE + ".schedule").RecordSchedule
        steps = importlib.import_module(_PACKAGE + ".optimizer_steps").OptimizerSteps
        text = os.environ.get("DPRO_SEARCH_RECORD_SCHEDULE", "")
        chosen = schedule.from_text(text)._asdict() if text else {}
        steps(record.Recorder(os.environ["DPRO_SEARCH_RECORD_TO"], **chosen))
    except Exception as error:
        sys.stderr.write("dpro-search: recorder: this process is not recorded: %s\n" % error)


def _loaded():
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "record")
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    return package
