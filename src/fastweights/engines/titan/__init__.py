"""Our language models in torchtitan, which reads this package as ``--module
fastweights.engines.titan``.
"""
