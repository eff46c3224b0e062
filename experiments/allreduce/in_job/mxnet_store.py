"""MXNet's KVStore (dist_sync) or BytePS: every gradient is pushed when it is there, and its sum pulled, as Gluon's trainers do."""

import time

import mxnet


class Job:
    """Attributes: `reports`, whether this process writes results; `version`."""

    def __init__(self, scheme, folder):
        self._exchange = {"mxnet-kvstore": _KVStore, "mxnet-byteps": _BytePS}[scheme]()
        self.reports = self._exchange.rank == 0
        self.version = self._exchange.version

    def training(self, waits_us, moments):
        count = sum(map(len, moments))
        # Tensors of the first layers, which come last, go first: what trainers give as priorities.
        tensors = [[self._exchange.tensor(size) for size in sizes] for sizes in moments]

        def step():
            time.sleep(waits_us[0] / 1e6)
            number = 0
            for some, wait_us in zip(tensors, waits_us[1:]):
                time.sleep(wait_us / 1e6)
                for tensor in some:
                    self._exchange.sum(tensor, number - count)
                    number += 1
            for some in tensors:
                for _, value in some:
                    value.wait_to_read()

        return step

    def exchange(self, elements):
        tensor = self._exchange.tensor(elements)

        def run():
            self._exchange.sum(tensor, 0)
            tensor[1].wait_to_read()

        return run

    def stop(self):
        mxnet.nd.waitall()
        self._exchange.stop()


class _KVStore:
    def __init__(self):
        self._store = mxnet.kv.create("dist_sync")
        self.rank = self._store.rank
        self.version = "mxnet " + mxnet.__version__
        self._keys = 0

    def tensor(self, elements):
        value = mxnet.nd.zeros((elements,))
        key, self._keys = self._keys, self._keys + 1
        self._store.init(key, value)
        return key, value

    def sum(self, tensor, priority):
        key, value = tensor
        self._store.pushpull(key, value, out=value, priority=priority)

    def stop(self):
        pass


class _BytePS:
    def __init__(self):
        import byteps.mxnet as bps

        bps.init()
        self._bps = bps
        self.rank = bps.rank()
        self.version = "mxnet " + mxnet.__version__ + ", byteps"
        self._names = 0

    def tensor(self, elements):
        name, self._names = "tensor_%d" % self._names, self._names + 1
        self._bps.byteps_declare_tensor(name)
        return name, mxnet.nd.zeros((elements,))

    def sum(self, tensor, priority):
        name, value = tensor
        self._bps.byteps_push_pull(value, version=0, priority=priority, name=name, is_average=False)

    def stop(self):
        self._bps.shutdown()
