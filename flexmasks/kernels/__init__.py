"""Own kernels and operators: tensors come in, tensors go out.

The operators are registered here, so that `import flexmasks` is all that a saved graph with one of them needs.
"""

from flexmasks.kernels import few_queries as few_queries
from flexmasks.kernels import index_lists as index_lists
from flexmasks.kernels import softmax_operator as softmax_operator
from flexmasks.kernels import tanh as tanh
