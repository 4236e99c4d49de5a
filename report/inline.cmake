# Puts style, scripts and D3 into page.html, which leaves one template that needs no other file, and
# writes it as HTML and as C++. Run by the build as
#   cmake -DSOURCE=report -DSCRIPTS=a.js,b.js -DD3=d3.min.js -DHTML=out.html -DCPP=out.cc -P inline.cmake
# SPDX-License-Identifier: Apache-2.0
cmake_minimum_required(VERSION 3.25)

file(READ "${SOURCE}/page.html" page)
file(READ "${SOURCE}/style.css" style)
file(READ "${SOURCE}/d3_licence.txt" licence)
file(READ "${D3}" d3)
string(REPLACE "," ";" scripts "${SCRIPTS}")
set(script "")
foreach(name IN LISTS scripts)
  file(READ "${SOURCE}/${name}" text)
  string(APPEND script "${text}")
endforeach()
# What ends a script element must not stand inside one.
foreach(part IN ITEMS script d3)
  if("${${part}}" MATCHES "</[sS][cC][rR][iI][pP][tT]")
    message(FATAL_ERROR "a script of the report holds the tag that ends it")
  endif()
endforeach()
string(REPLACE "@STYLE@" "${style}" page "${page}")
string(REPLACE "@D3_LICENCE@" "${licence}" page "${page}")
string(REPLACE "@SCRIPT@" "${script}" page "${page}")
string(REPLACE "@D3@" "${d3}" page "${page}")
file(WRITE "${HTML}" "${page}")
file(WRITE "${CPP}" "#include \"report/template.h\"\n\nnamespace lln::report {\n\n"
  "std::string_view page_template() noexcept {\n  return R\"~page~(${page})~page~\";\n}\n\n"
  "}  // namespace lln::report\n")
