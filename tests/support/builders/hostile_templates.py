"""Chat templates that mean harm: by what they try to reach, and by what they cost.

The escapes are those that worked on some renderer of templates once, and their like; what they want is the name of a
class, a module or a file.
"""

ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by subscript": "{{ ''['__class__']['__base__']['__subclasses__']() }}",
    "classes by filter": "{{ ((('' | attr('__class__')) | attr('__base__')) | attr('__subclasses__'))() }}",
    "classes by format": "{{ '{0.__class__.__base__}'.format(messages) }}{{ '{0.__class__.__base__.x}'.format('') }}",
    "classes by format_map": "{{ '{m.__class__.__base__.x}'.format_map({'m': ''}) }}",
    "format by filter": "{{ ('{0.__class__.__base__.x}' | attr('format'))('') }}",  # CVE-2025-27516
    "format by map": "{{ ['{0.__class__.__base__.x}'] | map('attr', 'format') | first | string }}{{ 1 // 0 }}",
    "globals of a global": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "globals of a function": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "globals of our function": "{{ raise_exception.__globals__['os']._exit(0) }}",
    "globals of a filter": "{{ namespace.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "context": "{{ self._TemplateReference__context.environment.sandboxed.x }}",
    "frames": "{{ (messages | map('upper')).gi_frame.f_globals.x }}",
    "code": "{{ raise_exception.__code__.co_consts.x }}",
    "exception": "{{ (1).__truediv__(0) }}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '../../../etc/passwd' %}",
    "change of its data": "{% set x = messages.append('y') %}",
    "change of the settings": "{{ messages.__init__([]) }}",
    "an end of the worker": "{{ ''.__class__.__base__.__subclasses__()[0].exit() }}",
    "a tag that is none": "{% do messages.clear() %}",
    "brackets without end": "{{ " + "(" * 100_000 + " }}",
    "blocks without end": "{% for a in 'a' %}" * 500 + "{% endfor %}" * 500,
    "macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a range of ten million": "{{ range(10000000) | list }}",
    "json without end": "{{ messages | tojson(indent={}) }}",
}
COSTS = {
    "text times two billion": "{{ 'a' * 2000000000 }}",
    "text times a million, often": "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
    "list times a billion": "{% set x = [0] * 1000000000 %}",
    "text doubled": "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "list doubled": "{% set n = namespace(x=[0]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "center": "{{ 'a' | center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "indent": "{{ ('a\n' * 1000) | indent(2000000) }}",
    "wide format": "{{ '%2000000000d' | format(1) }}",
    "wide format by percent": "{{ '%2000000000d' % 1 }}",
    "wide format by method": "{{ '{:>2000000000}'.format(1) }}",
    "precision": "{{ '%.2000000000f' % 1 }}",
    "replace": "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "join": "{{ (range(100000) | list) | join('a' * 100000) }}",
    "slice": "{{ range(9) | slice(1000000000) | list | length }}",
    "batch": "{{ range(9) | batch(1000000000, 0) | list | length }}",
    "two loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "three loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of a variable": "{% set n = 9 %}{% set x = n ** (n ** n) %}",
    "power and remainder": "{% set n = 7 %}{{ (n ** (10 ** 8)) % 10 }}",
    "shift by a power": "{% set n = 2 %}{{ (n ** 4000000000) // 3 }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "lipsum of long lines": "{{ lipsum(n=3, min=1000000, max=9000000) }}",
    "words": "{{ ('a ' * 50000000) | wordcount }}",
    "wordwrap": "{{ ('a' * 4000000) | wordwrap(1) }}",
    "sort": "{{ (range(99999) | list * 100) | sort | length }}{% for i in range(99999) %}"
    "{{ range(99999) | sort(reverse=true) | length }}{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "loop that recurses": "{% for a in [[[]]] recursive %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "json of much": "{% for i in range(99999) %}{{ (range(99999) | list) | tojson | length }}{% endfor %}",
    "cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set x = c.next() %}{% endfor %}{% endfor %}",
    "much text": "a" * 1_000_000 + "{% for i in range(9) %}{{ 'b' * 500000 }}{% endfor %}",
    "pretty": "{% for i in range(99999) %}{{ (range(9999) | list) | pprint | length }}{% endfor %}",
    "tags": "{% for i in range(99999) %}{{ (('<!--' * 99999) ~ i) | striptags | length }}{% endfor %}",
    "links": "{% for i in range(99999) %}{{ ((i ~ ' a.com ') * 9999) | urlize | length }}{% endfor %}",
}
